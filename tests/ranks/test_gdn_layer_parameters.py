"""The layer's parameters are cut, loaded, saved and differentiated as the oracle says."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oracles import sharding
from oracles.layer import Layer
from oracles.sharding import AT_REST, Mesh, Shard
from tests.gdn_calls import NAMES, Call, cut, make
from verify.adapters.gdn import weights as layer_weights
from verify.ranks.collectives import Alone, Place, simulate

# Parameters


@settings(max_examples=20)
@given(mesh=st.builds(Mesh, st.integers(1, 3), st.integers(1, 3)), bias=st.booleans(), groups=st.integers(1, 2))
def test_metadata_are_the_oracle_s(mesh: Mesh, bias: object, groups: int) -> None:
    layer = Layer(3, mesh.tp * mesh.cp, mesh.tp * mesh.cp * groups, 2, 5)
    about = layer_weights.metadata(layer, conv_bias=bool(bias))
    known = sharding.parameters(layer)
    assert list(about) == [name for name in known if bias or name != "conv.bias"]
    for name, entry in about.items():
        assert (entry.shape, entry.axis, entry.gradient_sum) == (known[name].shape, known[name].axis, known[name].gradient_sum)
        for rank in mesh.ranks():
            assert torch.equal(entry.rows(rank.tp, mesh.tp), sharding.rows(layer, name, rank, AT_REST))


@pytest.mark.parametrize("after", [(1, 1), (2, 2), (1, 4), (4, 1)])
def test_resharded_checkpoint_is_exact(after: tuple[int, int]) -> None:
    """Tagged weights from (2, 2) to another mesh: every rank holds the part of the whole that it would get at once."""
    call = Call()
    whole = {name: torch.arange(weight.numel()).view(weight.shape).float() for name, weight in call.weights().items()}

    def save(place: Place) -> dict[str, Shard]:
        module = make(call, place)
        module.load(cut(module, whole))
        return module.shards()

    saved = simulate(2, 2, save)
    assert all(isinstance(shards, dict) for shards in saved), saved
    moved = {name: sharding.reshard(call.layer, [shards[name] for shards in saved], Mesh(*after)) for name in whole}  # type: ignore[index]

    def restore(place: Place) -> None:
        number = list(Mesh(*after).ranks()).index(place.rank)
        module = make(call, place)
        module.load({name: shards[number] for name, shards in moved.items()})
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, sharding.shard(call.layer, name, whole[name], place.rank, AT_REST).value)

    assert simulate(*after, restore) == [None] * (after[0] * after[1])


def test_load_refuses_what_is_not_its_own() -> None:
    call = Call()

    def work(place: Place) -> None:
        module = make(call, place)
        mine = cut(module, call.weights())
        other = {**mine, "A_log": dataclasses.replace(mine["A_log"], rows=mine["A_log"].rows.flip(0))}
        with pytest.raises(ValueError, match=r"shard of A_log must have rows \[.*\] along axis 0 of \(8,\), got \["):
            module.load(other)
        with pytest.raises(ValueError, match=r"shards must be of in_proj.weight, .*, got conv.weight"):
            module.load({name: shard for name, shard in mine.items() if name == "conv.weight"})
        half = dataclasses.replace(mine["A_log"], value=mine["A_log"].value.half())
        with pytest.raises(ValueError, match=r"shard of A_log must be torch.float32, got torch.float16"):
            module.load({**mine, "A_log": half})
        assert all(not parameter.any() for parameter in module.parameters()), "what is refused changes nothing"

    assert simulate(2, 1, work) == [None, None]


def test_parameters_that_took_no_part_have_a_gradient_of_zeros() -> None:
    module = make(Call(), Place(Alone(), Alone()))
    assert all(not gradient.any() for gradient in module.summed_gradients().values())
    assert list(module.summed_gradients()) == list(NAMES)
