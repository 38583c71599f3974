"""What the tests of a whole check share."""

from verify.engine.check import Check
from verify.engine.profiles import Profile
from verify.engine.state import Settings
from verify.findings.law_report import LawReport
from verify.findings.store import Store
from verify.process.worker import Worker

RIGHT = "tests/right.py:Chunkwise"
FEW = Profile("few", 8)


def checked(spec: str, laws: list[str], workers: list[Worker], store: Store, **options: object) -> list[LawReport]:
    """The reports of a check with 8 cases of a law, unless `options` say otherwise."""
    others = {name: options.pop(name) for name in ("on_case", "on_report", "defects", "examples") if name in options}
    options.setdefault("profile", FEW)
    with Check(Settings(spec, laws, **options), workers, store, **others) as check:  # type: ignore[arg-type]
        return check.run()
