"""Folders of results, changed as faults, users and earlier versions leave them."""

import json


def as_before_manifests(folder):
    """Make a folder of results one from before there were manifests."""
    for path in folder.rglob("manifest.json"):
        path.unlink()
    for path in (folder / "study.json", *folder.rglob("timing.json"), *folder.rglob("failure.json")):
        data = json.loads(path.read_text("utf-8"))
        del data["digest"]
        data.pop("id", None)
        path.write_text(json.dumps(data), "utf-8")


def damage(path, how, draw, others):
    """Change a file; `draw(n)` is a number below n, `others` are files to put in its place. False: nothing changed."""
    before = content = path.read_bytes()
    at = draw(len(content))
    digits = [number for number, byte in enumerate(content) if chr(byte).isdigit()]
    if how == "cut":
        content = content[:at]
    elif how == "digit" and digits and path.suffix != ".npz":
        at = digits[draw(len(digits))]
        content = content[:at] + str((int(chr(content[at])) + 1 + draw(9)) % 10).encode() + content[at + 1 :]
    elif how == "another" and others:
        content = others[draw(len(others))].read_bytes()
    else:
        content = content[:at] + bytes([content[at] ^ (1 << draw(8))]) + content[at + 1 :]
    path.write_bytes(content)
    return content != before
