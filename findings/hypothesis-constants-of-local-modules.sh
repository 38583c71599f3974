#!/bin/sh
# Hypothesis 6.170.15: the same seed draws other numbers if another local module is imported.
#
# A test draws 200 integers with @seed(7). Then it imports a module beside it that holds four numbers
# and is otherwise not used. Most of the 200 integers are other ones, and some are numbers of that
# module: Hypothesis collects constants of local modules and mixes them into what it draws. So a
# seed does not repeat a run in another checkout, or after an edit of an unrelated number.
#
# Seen on 27 November 2026 with Python 3.11: 127 of 200 differ.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q hypothesis==6.170.15
echo 'SIZES = (70001, 70002, 70003, 70004)' > beside.py
cat > draws.py <<'END'
import sys
from hypothesis import Phase, given, seed, settings, strategies

if "--beside" in sys.argv:
    import beside
values = []


@seed(7)
@settings(max_examples=200, database=None, phases=[Phase.generate])
@given(strategies.integers(0, 10**6))
def draw(value):
    values.append(value)


draw()
print(*values)
END
environment/bin/python draws.py > alone.txt
environment/bin/python draws.py > again.txt
environment/bin/python draws.py --beside > beside.txt
environment/bin/python - <<'END'
alone, again, beside = (open(f"{name}.txt").read().split() for name in ("alone", "again", "beside"))
differ = sum(one != other for one, other in zip(alone, beside, strict=True))
taken = sum(value.startswith("7000") and len(value) == 5 for value in beside)
print(f"the same program twice: {sum(a != b for a, b in zip(alone, again, strict=True))} of {len(alone)} integers differ")
print(f"with another module imported: {differ} of {len(alone)} differ, {taken} are constants of that module")
raise SystemExit(not (alone == again and differ and taken))
END
