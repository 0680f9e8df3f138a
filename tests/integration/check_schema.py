"""Holds JSON against a schema of docs/schema, to the letter: a key that the schema does not know is
a mistake of one of them.

    check_schema.py SCHEMAS NAME < OUTPUT
"""

import json
import pathlib
import sys
import warnings

import jsonschema

warnings.simplefilter("ignore", DeprecationWarning)  # RefResolver, which jsonschema 3 and 4 both have


def strict(schema):
    """The schema, and no other keys: for users, new keys are none of their business."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: strict(value) for key, value in schema.items()}
    if isinstance(out.get("properties"), dict):
        out["additionalProperties"] = False
    return out


def main():
    folder, name = pathlib.Path(sys.argv[1]), sys.argv[2]
    schemas = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.schema.json")}
    schema = strict(schemas[f"{name}.schema.json"])
    jsonschema.Draft7Validator.check_schema(schema)
    store = {known: strict(one) for known, one in schemas.items()}
    resolver = jsonschema.RefResolver("", schema, store=store)
    errors = list(jsonschema.Draft7Validator(schema, resolver=resolver).iter_errors(json.load(sys.stdin)))
    for error in errors:
        print(f"{name}: {'/'.join(map(str, error.absolute_path)) or 'top'}: {error.message[:400]}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
