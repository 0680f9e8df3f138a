"""How pip builds the package (PEP 517): libstasis by CMake, the extension by one call of the compiler.

With the standard library only, so that `pip install .` needs no index and no other backend. A libstasis
that is there already is taken with STASIS_LIBRARY_DIR=build/release/lib, or
--config-settings library=DIR. What comes out has the library inside and needs nothing else of Stasis.
"""

import base64
import glob
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
SOURCE = os.path.dirname(HERE)

CLASSIFIERS = ("Development Status :: 4 - Beta", "Environment :: GPU :: NVIDIA CUDA", "Intended Audience :: Developers",
               "Intended Audience :: Science/Research", "Intended Audience :: System Administrators",
               "License :: OSI Approved :: MIT License", "Operating System :: POSIX :: Linux",
               "Programming Language :: C++", "Programming Language :: Python :: 3", "Topic :: System :: Systems Administration",
               "Typing :: Typed")
SUMMARY = "Transparent checkpoint and restore of running CUDA programs"


def version():
    with open(os.path.join(SOURCE, "src", "base", "version.h"), encoding="utf-8") as file:
        return re.search(r'kVersion = "([^"]+)"', file.read())[1]


def who():
    """Lines for the home page and the maintainer, where the environment names them, as for the other packages."""
    lines = ""
    if home := os.environ.get("STASIS_HOMEPAGE"):
        lines += f"Project-URL: Homepage, {home}\n"
    if named := re.fullmatch(r"([^<>]+) <([^<>]+)>", os.environ.get("STASIS_MAINTAINER", "")):
        lines += f"Maintainer: {named[1]}\nMaintainer-email: {named[2]}\n"
    return lines


def metadata():
    with open(os.path.join(SOURCE, "docs", "python.md"), encoding="utf-8") as file:
        description = file.read()
    return (f"Metadata-Version: 2.1\nName: stasis\nVersion: {version()}\nSummary: {SUMMARY}\nLicense: MIT\n"
            "Requires-Python: >=3.9\nKeywords: CUDA,GPU,checkpoint,restore,suspend,CRIU\n"
            + who() + "".join(f"Classifier: {one}\n" for one in CLASSIFIERS) +
            f"Description-Content-Type: text/markdown\n\n{description}")


def library_folder(settings):
    given = (settings or {}).get("library") or os.environ.get("STASIS_LIBRARY_DIR")
    if given:
        return os.path.abspath(given)
    build = os.path.join(SOURCE, "build", "release")
    for command in (["cmake", "--preset", "release"], ["cmake", "--build", build, "--target", "stasis_capi"]):
        subprocess.run(command, cwd=SOURCE, check=True)
    return os.path.join(build, "lib")


def digest(data):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def licences():
    """Of what is compiled into the extension and the library beside it, by package; those that are found here."""
    with open(os.path.join(SOURCE, "packaging", "as_packages_have_it.cmake"), encoding="utf-8") as file:
        packages = " ".join(re.findall(r"^set\(compiled_in\w* ([^)]*)\)", file.read(), re.M)).split()
    found = {}
    for package in packages:
        path = f"/usr/share/doc/{package}/copyright"
        if os.path.exists(path):
            with open(path, "rb") as file:
                found[package] = file.read()
    try:
        of_pip = importlib.metadata.files("pybind11") or []
    except importlib.metadata.PackageNotFoundError:
        of_pip = []
    for path in of_pip:
        if path.name.startswith("LICENSE"):
            found["pybind11"] = path.read_binary()
    return found


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    abi = tag + getattr(sys, "abiflags", "")
    name = f"stasis-{version()}-{tag}-{abi}-linux_x86_64.whl"
    info = f"stasis-{version()}.dist-info"
    files = {
        f"{info}/METADATA": (metadata().encode(), 0o644),
        f"{info}/WHEEL": (f"Wheel-Version: 1.0\nGenerator: stasis\nRoot-Is-Purelib: false\n"
                          f"Tag: {tag}-{abi}-linux_x86_64\n".encode(), 0o644),
    }
    with open(os.path.join(SOURCE, "LICENSE"), "rb") as file:
        files[f"{info}/LICENSE"] = (file.read(), 0o644)
    for package, text in licences().items():
        files[f"{info}/licenses/{package}"] = (text, 0o644)
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([os.path.join(HERE, "build-package"), "--library", library_folder(config_settings),
                        "--out", work, "--python", sys.executable, "--bundle"], check=True)
        for folder, _, names in os.walk(work):
            for one in names:
                path = os.path.join(folder, one)
                with open(path, "rb") as file:
                    mode = 0o755 if os.access(path, os.X_OK) else 0o644
                    files[os.path.relpath(path, work)] = (file.read(), mode)
    record = "".join(f"{path},{digest(data)},{len(data)}\n" for path, (data, _) in files.items())
    files[f"{info}/RECORD"] = ((record + f"{info}/RECORD,,\n").encode(), 0o644)
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, (data, mode) in files.items():
            entry = zipfile.ZipInfo(path)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            wheel.writestr(entry, data)
    return name


def build_sdist(sdist_directory, config_settings=None):
    name = f"stasis-{version()}"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=SOURCE, check=True, stdout=subprocess.PIPE)
    with tempfile.TemporaryDirectory() as work, \
            tarfile.open(os.path.join(sdist_directory, name + ".tar.gz"), "w:gz") as archive:
        about = os.path.join(work, "PKG-INFO")
        with open(about, "w", encoding="utf-8") as file:
            file.write(metadata())
        archive.add(about, f"{name}/PKG-INFO")
        for path in filter(None, listed.stdout.decode().split("\0")):
            archive.add(os.path.join(SOURCE, path), f"{name}/{path}", recursive=False)
    return name + ".tar.gz"


def main():
    """backend.py DIR: what says that the package in DIR is installed, and which version."""
    info = os.path.join(sys.argv[1], f"stasis-{version()}.dist-info")
    for older in glob.glob(os.path.join(glob.escape(sys.argv[1]), "stasis-*.dist-info")):
        shutil.rmtree(older)
    os.makedirs(info, exist_ok=True)
    with open(os.path.join(info, "METADATA"), "w", encoding="utf-8") as file:
        file.write(metadata())


if __name__ == "__main__":
    main()
