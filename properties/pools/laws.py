"""The laws of states in a pool. Each law says which slots of the pool it is about."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from properties.laws.common import memory_law
from properties.laws.far_views import FAR, can_be_far, far_examples, lacks_far
from properties.laws.law import Law, either, examples_of, firm_examples
from properties.laws.views import pure_law, side_by_side
from properties.pools import checks
from properties.pools.case import PoolCase
from properties.pools.domain import POOL_VIEWS, PoolDomain, limits, pool_cases
from properties.pools.histories import histories, history, turns
from properties.pools.rows import begins_of
from properties.rules.drawing import REMEMBERING, keys_of, values_of
from properties.words.domain import INDICES, MIXED
from properties.words.example import Example
from properties.words.line import MAX_WIDTH

POISON = ("nan", "random")
CARRIED = ("values", "nan")
DECAYING = ("10", "64")  # gates with which one token changes much of a state and leaves much of it
BLOCKS_OF_HEADS = (33, 66)  # key heads and value heads: over a block of 32, and over two
NEW_REQUESTS, NEW_TOKENS = 15, 11  # requests of a call, and tokens of each, that no other case has


@st.composite
def _draft_examples(draw: st.DrawFn, strategy: st.SearchStrategy[PoolCase]) -> Example:
    """Draw drafts with a place `at`: any of their tokens after which the draft is left."""
    case = draw(strategy.filter(lambda case: len(_drafts(case)) > 0))
    return Example(case, draw(st.randoms(use_true_random=True)).choice(_drafts(case)))


def _strided_examples(domain: PoolDomain) -> st.SearchStrategy[Example]:
    """Draw a view that the domain promises; one in five has far slots and one in five far tokens or heads, if it has both."""
    rule, far_ones = domain.rule, {}
    if can_be_far(domain) and {"fused", "sliced"} & {*domain.views}:
        far_ones["far_tokens"] = pool_cases(domain, most=8, kinds=("drafts", "prompts"))
    if can_be_far(domain) and "strided" in domain.views:
        groups = ((5, 5), (8, 8), (5, 10)) if rule.grouped_heads else ((5, 5), (8, 8))
        far_ones["far_heads"] = pool_cases(domain, most=3, groups=groups)
    kinds = tuple(how for how in domain.views if how not in (MIXED, INDICES))
    choices = [examples_of(pool_cases(domain, most=8), None, kinds)] * 3 if kinds else []
    choices += [examples_of(pool_cases(domain, most=8), None, (how,)) for how in (MIXED, INDICES) if how in domain.views]
    # By themselves, because a pool of 2^31 numbers is usual: a short check should not miss them.
    choices += [far_examples(domain, {"far_slots": pool_cases(domain, most=3, spare=(5, 7))})] if domain.apart else []
    choices += [far_examples(domain, far_ones)] if far_ones else []
    return either(choices)


def _firm_views(domain: PoolDomain) -> list[Example]:
    """Return an example of each view of several tensors: drafts of several requests, some of which are accepted in part."""
    accepted = "some" if domain.accepts and domain.most_tokens > 1 else "all"
    drafts = _remember(domain, most=8, kinds=("drafts",), values="ordinary", padded="none", fresh="none", state="random")
    drafts = drafts.filter(lambda case: case.accepted == accepted and 1 < len(case.lengths) <= len({*case.accepted_counts}) + 1)
    firm = [examples_of(drafts, None, (how,)) for how in (MIXED, INDICES) if how in domain.views]
    firm += [examples_of(drafts.map(side_by_side), None, ("fused",))] if "fused" in domain.views else []
    return firm_examples(domain, *firm)


def _failing(domain: PoolDomain) -> list[Example]:
    """Return examples in which memory runs out: in the first calls of a process, whose values are several blocks of 64 channels, in
    calls of a new size, in a decode of one token of each request, and in one with several blocks of 32 heads.

    No other case has so many requests of so many tokens, so that what an implementation makes for the first call of a size, such as
    a table, is made while operations fail.
    """
    wide = tuple(width for width in range(257, 64, -1) if domain.rule.has_value(width))[:1]
    narrow: dict[str, Any] = {"key_dim": keys_of(domain.rule, 16), "values": "ordinary", "gate": DECAYING, "beta": ("ordinary",)}
    short = pool_cases(domain, most=2, kinds=("drafts",), value_dim=wide, **narrow)
    blocks = [examples_of(short, None, ("failed",))] if wide and not domain.rule.equal_widths else []
    lengths = (min(NEW_TOKENS, domain.most_tokens),) * NEW_REQUESTS
    usual: dict[str, Any] = {"state_dtype": domain.states_of(domain.rule.dtypes[0])[0], "dtype": domain.rule.dtypes[0]}
    usual |= {"padded": "none", "accepted": "all", "state": "random", **narrow}
    new = pool_cases(domain, value_dim=values_of(domain.rule, 16), **usual)
    new = new.map(lambda case: dataclasses.replace(case, lengths=lengths, drafts="chain", packed=not domain.rule.batched))
    steps = pool_cases(domain, kinds=("steps",), fresh="none", **usual)
    steps = steps.filter(lambda case: case.packed != domain.rule.batched and len(case.lengths) > 1 and min(case.lengths) > 0)
    new = new.filter(lambda case: domain.outside(case) is None)
    keys, heads = BLOCKS_OF_HEADS
    groups = ((keys if domain.rule.grouped_heads else heads, heads),)
    small = {"value_dim": values_of(domain.rule, 16), "spare": 1, "padded": "none", **narrow}
    many = pool_cases(domain, most=1, kinds=("steps",), groups=groups, **small).filter(lambda case: domain.outside(case) is None)
    return firm_examples(domain, *blocks, *(examples_of(drawn, None, ("failed",)) for drawn in (new, steps, many)))


def _many_blocks(domain: PoolDomain) -> list[Example]:
    """Return a case whose values are over 64 of the smallest blocks, or the widest below. There is none if K must equal V."""
    if domain.rule.equal_widths:
        return []
    least = 64 * min(domain.blocks, default=1) + 1
    wide = next((width for width in (*range(least, MAX_WIDTH + 1), *range(least, 0, -1)) if domain.rule.has_value(width)), 0)
    narrow: dict[str, Any] = {"key_dim": keys_of(domain.rule, 16), "value_dim": wide, "values": "ordinary", "block_v": "default"}
    return firm_examples(domain, examples_of(pool_cases(domain, most=2, **narrow).filter(lambda case: case.tokens > 1)))


def _promises(name: str) -> Callable[[PoolDomain], str | None]:
    def needs(domain: PoolDomain) -> str | None:
        return None if getattr(domain, name) else f"{name.replace('_', ' ')} is not supported"

    return needs


def _drafts(case: PoolCase) -> range:
    """Return the tokens after which a draft may be left.

    Empty unless every request has a token and the case does not itself say how many tokens are kept.
    """
    longest = max(case.lengths)
    whole = case.accepted == "all" and case.drafts == "chain"
    return range(1, longest + 1) if longest > 1 and min(case.lengths) and whole else range(0)


def _several(case: PoolCase) -> range:
    return range(len(case.lengths)) if len(case.lengths) > 1 else range(0)


def _remember(domain: PoolDomain, **more: Any) -> st.SearchStrategy[PoolCase]:
    options: dict[str, Any] = {"gate": REMEMBERING, "beta": ("ordinary", "edges"), "values": ("ordinary", "correlated", "scaled")}
    return pool_cases(domain, **{**options, **more})


def _value_dims(domain: PoolDomain) -> tuple[int, ...]:
    """Return widths of values that are several blocks and a part of one, or all widths if the domain has no such width."""
    rule = domain.rule
    several = tuple(width for width in (24, 40, 65, 12) if rule.has_value(width))
    return several or values_of(rule, 128)


def _lacks(word: str, *values: str) -> Callable[[PoolCase, str | None], str | None]:
    def lacks(case: PoolCase, _: str | None) -> str | None:
        return None if case.words()[word] in values else f"{word}={'|'.join(values)}"

    return lacks


POOL_LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "oracle",
            "truth",
            "every output and the state in every slot of a request equal the float64 definition",
            lambda domain: examples_of(pool_cases(domain)),
            checks.oracle,
            always=lambda domain: [Example(case) for case in limits(domain)],
            base=True,
        ),
        Law(
            "untouched",
            "exact",
            "slots that no request names keep every bit, NaN included, and so does the memory before and behind the pool",
            lambda domain: examples_of(pool_cases(domain, padded=("none", "some", "all"), most=8)),
            checks.untouched,
        ),
        Law(
            "padding",
            "exact",
            "the inputs of padding requests change nothing, bit for bit",
            lambda domain: examples_of(pool_cases(domain, padded=("some", "all"), most=8), None, CARRIED),
            checks.padding,
            _promises("padding_slots"),
            variants=CARRIED,
            lacks=_lacks("padded", "some", "all"),
        ),
        Law(
            "poison",
            "exact",
            "the states in slots that no request names change nothing, bit for bit",
            lambda domain: examples_of(pool_cases(domain, spare=(1, 2, 5), most=8), None, POISON),
            checks.poison,
            variants=POISON,
        ),
        Law(
            "fresh",
            "exact",
            "a request that begins starts from zeros, whatever its slot contains, bit for bit",
            lambda domain: examples_of(
                _remember(domain, fresh=("some", "all"), most=8).filter(lambda case: any(begins_of(case))), None, POISON
            ),
            checks.fresh,
            _promises("fresh"),
            variants=POISON,
            lacks=_lacks("fresh", "some", "all"),
        ),
        Law(
            "accept",
            "truth",
            "k tokens at once, k single steps and the k accepted tokens of a draft leave the same state, for every k",
            lambda domain: _draft_examples(_remember(domain, kinds=("drafts",), most=8, accepted="all", drafts="chain")),
            checks.accept,
            lambda domain: None if domain.most_tokens > 1 else "drafts are not supported",
            place=_drafts,
        ),
        Law(
            "slots",
            "truth",
            "requests in other slots get the same outputs and states, bit for bit if position_independent=True",
            lambda domain: examples_of(pool_cases(domain, spare=(1, 2, 5), most=8)),
            checks.other_slots,
        ),
        Law(
            "requests",
            "exact",
            "changing one request and its state changes nothing of the others, bit for bit",
            lambda domain: examples_of(pool_cases(domain, most=8), _several),
            checks.requests,
            place=_several,
        ),
        Law(
            "history",
            "truth",
            "a call gives the same results whatever calls came before it or run beside it, bit for bit after the same shapes "
            "if deterministic=True",
            histories,
            history,
            variants=("shapes", "freed", "inference", "refused", "failed", "threads", "streams"),
            plain=True,
            of_process=True,
            draw_gpu=functools.partial(histories, gpu=True),
            turns=turns,
            always=_failing,
            begins=lambda domain: _failing(domain) if domain.drawing.quick else [],  # elsewhere a process takes a second to start
        ),
        Law(
            "refill",
            "truth",
            "a call whose tensors held the numbers of another call before gives its own results, also replayed from a CUDA graph",
            lambda domain: examples_of(pool_cases(domain, kinds=("steps", "drafts", "prompts", "crowd"))),
            checks.refill,
            _promises("refills"),
            always=lambda domain: firm_examples(
                domain, examples_of(_remember(domain, kinds=("crowd",), values="ordinary", padded="none"))
            ),
        ),
        memory_law(functools.partial(pool_cases, most=8), checks.memory),
        Law(
            "blocks",
            "truth",
            "every number of value channels in a block gives the same results within the tolerance",
            lambda domain: examples_of(pool_cases(domain, most=8, block_v="default", value_dim=_value_dims(domain))),
            checks.blocks,
            _promises("blocks"),
            lacks=_lacks("block_v", "default"),
            always=_many_blocks,
        ),
        Law(
            "strides",
            "truth",
            "tokens may have any strides, and slots need not lie next to each other in memory",
            _strided_examples,
            checks.strides,
            lambda domain: None if domain.rule.views else "strided views are not supported",
            variants=(*POOL_VIEWS, *FAR, "far_slots"),
            lacks=lacks_far,
            always=_firm_views,
        ),
        pure_law(
            functools.partial(pool_cases, most=8),
            checks.pure,
            says="a call changes neither its inputs nor the memory around them, except a pool that is updated in place",
        ),
    )
}
