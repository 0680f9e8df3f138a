"""The manifests of deploy/kubernetes, for kubernetes.bats.

    pod_manifests.py validate FILE...
    pod_manifests.py bundle FILE BUNDLE MOUNT=SOURCE... -- COMMAND...

`validate` compares each document with the models of Kubernetes' own client (Debian's python3-kubernetes): no field
that there is not, none of another type, none missing that must be there; 77 if the client or PyYAML is not there.

`bundle` changes the config.json of `runc spec` in BUNDLE into what a kubelet would ask for: the command, rights and
mounts of the first container. What the manifest has after `--` is replaced by COMMAND, and so is where its volumes
come from. The root is this machine's own /usr.
"""

import json
import os
import sys

client = None
try:
    import yaml

    if sys.argv[1] == "validate":
        from kubernetes import client
except ImportError as missing:
    print(f"no {missing.name} for Python (Debian's python3-kubernetes)")
    sys.exit(77)

PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object, "datetime": str}


def check(kind, value, where, problems):
    """The value as a model, or what it is; says in `problems` what is wrong."""
    if kind.startswith("list["):
        if not isinstance(value, list):
            problems.append(f"{where}: a list is wanted, and there is {value!r}")
            return None
        return [check(kind[5:-1], one, f"{where}[{i}]", problems) for i, one in enumerate(value)]
    if kind.startswith("dict("):
        if not isinstance(value, dict):
            problems.append(f"{where}: a map is wanted, and there is {value!r}")
            return None
        inner = kind[5:-1].split(", ", 1)[1]
        # Kubernetes takes numbers for quantities, and its client types them as texts.
        return {key: check("object" if inner == "str" and isinstance(one, int) and not isinstance(one, bool) else inner,
                           one, f"{where}.{key}", problems) for key, one in value.items()}
    if kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            problems.append(f"{where}: {kind} is wanted, and there is {value!r}")
        return value
    model = getattr(client, kind)
    if not isinstance(value, dict):
        problems.append(f"{where}: a map is wanted, and there is {value!r}")
        return None
    names = {theirs: ours for ours, theirs in model.attribute_map.items()}
    known = {}
    for name, one in value.items():
        if name in names:
            known[names[name]] = check(model.openapi_types[names[name]], one, f"{where}.{name}", problems)
        else:
            problems.append(f"{where}.{name}: {kind} has no such field")
    try:
        return model(**known)
    except ValueError as wrong:  # what must be there is not
        problems.append(f"{where}: {wrong}")
        return None


def documents(path):
    with open(path, encoding="utf-8") as file:
        return list(yaml.safe_load_all(file))


def validate(paths):
    problems = []
    for path in paths:
        for number, document in enumerate(documents(path)):
            where = f"{os.path.basename(path)}[{number}]"
            group, _, version = document.get("apiVersion", "").rpartition("/")
            kind = version.capitalize() + document.get("kind", "")
            if not hasattr(client, kind) or group not in ("", "batch", "apps"):
                problems.append(f"{where}: there is no kind {document.get('kind')} of {document.get('apiVersion')}")
                continue
            check(kind, document, where, problems)
    print("\n".join(problems))
    return 1 if problems else 0


def bundle(path, folder, words):
    cut = words.index("--")
    sources = dict(word.split("=", 1) for word in words[:cut])
    pod = next(d for d in documents(path) if d["kind"] == "Job")["spec"]["template"]["spec"]
    container = pod["containers"][0]
    command = container["command"]
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        config = json.load(file)
    config["process"].update(
        terminal=False, args=command[: command.index("--") + 1] + words[cut + 1:],
        env=[f"{name}={value}" for name, value in os.environ.items()
             if name in ("PATH", "LD_LIBRARY_PATH") or name.startswith("STASIS_")])
    config["root"]["readonly"] = False
    rights = [f"CAP_{name}" for name in DEFAULT_CAPABILITIES + container["securityContext"]["capabilities"]["add"]]
    config["process"]["capabilities"] = {kind: rights for kind in ("bounding", "effective", "permitted")}
    config["process"].pop("noNewPrivileges", None)  # as allowPrivilegeEscalation, which is so by itself
    # The network is the machine's: that needs no set-up.
    config["linux"]["namespaces"] = [n for n in config["linux"]["namespaces"] if n["type"] in ("pid", "mount", "ipc", "uts")]
    config["mounts"] = [m for m in config["mounts"] if m["type"] != "cgroup"]
    for name in ("bin", "sbin", "lib", "lib64"):
        if os.path.islink(f"/{name}") and not os.path.islink(f"{folder}/rootfs/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{folder}/rootfs/{name}")
    binds = {mount["mountPath"]: sources.pop(mount["mountPath"]) for mount in container["volumeMounts"]}
    for where, source in {"/usr": "/usr", **binds, **sources}.items():
        config["mounts"].append({"destination": where, "type": "bind", "source": source,
                                 "options": ["rbind", "ro" if where == "/usr" else "rw"]})
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump(config, file)
    print(pod["terminationGracePeriodSeconds"])
    return 0


# What containerd gives to a container that does not ask for more or less.
DEFAULT_CAPABILITIES = (
    "AUDIT_WRITE CHOWN DAC_OVERRIDE FOWNER FSETID KILL MKNOD NET_BIND_SERVICE NET_RAW SETFCAP SETGID SETPCAP SETUID "
    "SYS_CHROOT").split()


if __name__ == "__main__":
    if sys.argv[1] == "validate":
        sys.exit(validate(sys.argv[2:]))
    sys.exit(bundle(sys.argv[2], sys.argv[3], sys.argv[4:]))
