"""What is installed is what the tree holds: the wheel and the sdist are built once and looked into."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("callbacks", "configs", "strategies")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_in_the_tree():
    core = {path.parent.relative_to(ROOT) for path in (ROOT / "lightning_embodied").rglob("__init__.py")}
    mapped = {path.parent.relative_to(ROOT) for name in MAPPED for path in (ROOT / name).rglob("__init__.py")}
    return {".".join(path.parts) for path in core | {Path("lightning_embodied") / path for path in mapped}}


def files_in_the_tree():
    """Files by their path in the installed package."""
    names = {}
    for folder, target in [("lightning_embodied", ""), *((name, name) for name in MAPPED)]:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                names[(Path("lightning_embodied") / target / path.relative_to(ROOT / folder)).as_posix()] = path
    return names


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    for name in ("lightning_embodied", *MAPPED):  # a copy: setuptools leaves egg-info and build folders where it works
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
        cwd=out,
    )
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def test_every_package_is_listed():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_in_the_tree()


def test_the_wheel_holds_every_file_of_the_package_and_nothing_beside_it(built):
    names = [name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name]
    assert set(names) == set(files_in_the_tree())
    assert {name.split("/")[0] for name in names} == {"lightning_embodied"}


@pytest.mark.parametrize("suffix", ["py.typed", ".yaml", ".json", ".html.jinja"])
def test_the_wheel_holds_the_data_files(built, suffix):
    assert any(name.endswith(suffix) for name in zipfile.ZipFile(built[0]).namelist())


def test_the_sdist_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    source = next(tmp_path.iterdir())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "out"), str(source)],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    again = next((tmp_path / "out").glob("*.whl"))
    assert set(zipfile.ZipFile(again).namelist()) == set(zipfile.ZipFile(built[0]).namelist())


def test_metadata_and_extras(built):
    wheel = zipfile.ZipFile(built[0])
    metadata = wheel.read(next(name for name in wheel.namelist() if name.endswith("METADATA"))).decode()
    assert "Name: lightning-embodied" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    for extra in ("models", "ray", "webdataset", "wandb", "fp8", "onnx", "cuda", "sim", "dev", "all"):
        assert f"Provides-Extra: {extra}" in metadata


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """A virtual environment with the wheel; its dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = next((folder / "lib").glob("python*")) / "site-packages"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(built[0]),
    ]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(pip, check=True, capture_output=True, env=environment)
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "dependencies.pth").write_text("\n".join(here))
    return python


def run(python, code, cwd):
    return subprocess.run(
        [str(python), "-c", code], check=True, capture_output=True, text=True, cwd=cwd, env={"PATH": "/usr/bin:/bin"}
    ).stdout.strip()


def test_the_installed_wheel_imports_every_package_from_elsewhere(installed, tmp_path):
    names = sorted(packages_in_the_tree())
    code = f"import importlib\nfor n in {names}: print(importlib.import_module(n).__file__)"
    files = run(installed, code, tmp_path).splitlines()
    assert len(files) == len(names)
    assert all(Path(file).is_relative_to(installed.parents[1]) for file in files)


def test_the_installed_wheel_beside_the_source_tree(installed):
    """From the repository's root `python -c` finds the source: it must be whole too."""
    code = (
        f"import lightning_embodied.{', lightning_embodied.'.join(MAPPED)}; print(lightning_embodied.configs.__file__)"
    )
    assert Path(run(installed, code, ROOT)) == ROOT / "configs" / "__init__.py"


def test_the_installed_command_finds_the_shipped_configs(installed, tmp_path):
    command = installed.parent / "lightning-embodied"
    assert "commands:" in subprocess.run([command, "--help"], check=True, capture_output=True, text=True).stdout
    code = "from lightning_embodied.cli.config_files import resolve_config as r; print(r('configs/quickstart.yaml'))"
    assert Path(run(installed, code, tmp_path).splitlines()[-1]).is_file()


def test_import_stays_light():
    code = "import sys, lightning_embodied; print(*sys.modules)"
    assert not {"torch", "lightning", "numpy", "ray", "wandb"} & set(run(sys.executable, code, ROOT).split())


def test_constraints_pin_every_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pins["torch"] == "2.13.0"
    assert not any("+" in version for version in pins.values())
    wanted = list(PROJECT["project"]["dependencies"])
    for extra in ("wandb", "sim", "models", "dev"):
        wanted += PROJECT["project"]["optional-dependencies"][extra]
    for requirement in wanted:
        name = requirement.split("[")[0].split(">")[0].split("=")[0].split(",")[0].strip().lower()
        assert name in pins, requirement
