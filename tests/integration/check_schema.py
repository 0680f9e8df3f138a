"""Holds JSON against a schema of docs/schema, to the letter: a key that the schema does not know is
a mistake of one of them.

    check_schema.py SCHEMAS NAME FILE [NAME FILE]...
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
    folder, outputs = pathlib.Path(sys.argv[1]), sys.argv[2:]
    store = {path.name: strict(json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("*.schema.json")}
    validators, wrong = {}, 0
    for name, output in zip(outputs[::2], outputs[1::2]):
        if name not in validators:
            schema = store[f"{name}.schema.json"]
            jsonschema.Draft7Validator.check_schema(schema)
            resolver = jsonschema.RefResolver("", schema, store=store)
            validators[name] = jsonschema.Draft7Validator(schema, resolver=resolver)
        said = json.loads(pathlib.Path(output).read_text(encoding="utf-8"))
        for error in validators[name].iter_errors(said):
            wrong = 1
            print(f"{name}: {'/'.join(map(str, error.absolute_path)) or 'top'}: {error.message[:400]}: "
                  f"{json.dumps(said)[:400]}", file=sys.stderr)
    return wrong


if __name__ == "__main__":
    sys.exit(main())
