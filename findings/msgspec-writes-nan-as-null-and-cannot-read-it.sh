#!/bin/sh
# msgspec 0.22.0: a float that is not a number is written as null, which its own reader refuses.
#
# A record has a float field. With NaN or infinity in it, msgspec writes null and says nothing. Its
# reader, with the same type, then refuses the record: "Expected `float`, got `null`". Its JSON
# Schema of the type also says `number`. Words are read in another way: with strict=False, "nan" and
# "-inf" become floats, and "1e400", which Python reads as infinity, is refused. So numbers of a
# kernel that overflowed survive as words and not as numbers.
#
# Seen on 27 November 2026 with Python 3.11.
# Exits with 0 while this is so, and with 1 if the behaviour changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv environment
environment/bin/pip install -q msgspec==0.22.0
cat > floats.py <<'END'
import math

import msgspec


class Record(msgspec.Struct):
    error: float


def said(read):
    try:
        return read().error
    except msgspec.ValidationError as error:
        return str(error)


written = [msgspec.json.encode(Record(error)).decode() for error in (math.nan, math.inf)]
again = said(lambda: msgspec.json.decode(written[0], type=Record))
words = [said(lambda: msgspec.convert({"error": word}, Record, strict=False)) for word in ("nan", "-inf", "1e400")]
schema = msgspec.json.schema(Record)["$defs"]["Record"]["properties"]["error"]
print("written:", *written)
print("read again:", again)
print("as words:", *words)
print("schema:", schema)
same = written == ['{"error":null}'] * 2 and again.startswith("Expected `float`, got `null`") and schema == {"type": "number"}
raise SystemExit(not (same and math.isnan(words[0]) and words[1] == -math.inf and str(words[2]).startswith("Number out of range")))
END
environment/bin/python floats.py
