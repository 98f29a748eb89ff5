"""The source distribution and the wheel are complete, and an installation by name from an index works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
from helpers.readme import QUICK_START, ROOT

pytest.importorskip("build", reason="make test-release")
pytest.importorskip("twine", reason="make test-release")

VERSION = "0.1.0"
INTEGRATIONS = ("huggingface", "reference_trainer", "tasks", "trainers", "verl_plugin")
OF_EXTRAS = ("megatron", "trl", "verl")  # the packages of these extras need not be installed


def run(*command: Any, cwd: Path | None = None, fails: bool = False) -> str:
    """Run a command that must succeed, or fail if `fails`. Return its stdout, with stderr if it fails."""
    # Nothing of this process may be imported instead of what is installed.
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("PYTHON", "TRITON", "PIP"))}
    done = subprocess.run([str(x) for x in command], cwd=cwd, capture_output=True, text=True, env=environment)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr if fails else done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the tracked files, so that no other file of the working tree gets into a distribution."""
    folder = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", cwd=ROOT).splitlines():
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(source: Path, folder: Path, *options: str) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", folder, source)
    return folder


@pytest.fixture(scope="module")
def distributions(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the source distribution, and the wheel from it. Return them by suffix."""
    folder = build(source, tmp_path_factory.mktemp("dist"))
    files = {path.suffix: path for path in folder.iterdir()}
    assert files.keys() == {".gz", ".whl"}
    return files


@pytest.fixture(scope="module")
def python(distributions: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel by name into an empty environment. Then add our dependencies. Return its Python."""
    index = tmp_path_factory.mktemp("index")
    project = index / "gspo-kernels"
    project.mkdir()
    for path in distributions.values():
        shutil.copy(path, project)
    links = "\n".join(f'<a href="{path.name}">{path.name}</a>' for path in distributions.values())
    (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    # Without dependencies: installing torch again would take minutes.
    run(python, "-m", "pip", "install", "-q", "--no-deps", "--index-url", index.as_uri(), "gspo-kernels")
    assert "gspo-kernels" in run(python, "-m", "pip", "list")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    ours = [x for x in sys.path if x.endswith("site-packages")]  # without the links of editable installations
    (packages / "dependencies.pth").write_text("\n".join(ours))
    return python


def test_twine_accepts_both_distributions(distributions: dict[str, Path]) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *distributions.values())


def test_the_wheel_has_the_library_and_nothing_else(distributions: dict[str, Path]) -> None:
    names = set(zipfile.ZipFile(distributions[".whl"]).namelist())
    code = {name for name in names if ".dist-info/" not in name}
    folders = {"gspo_kernels": "", "benchmarks": "benchmarks/", "integrations": "integrations/"}
    expected = {
        f"gspo_kernels/{place}{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in folders.items()
        for path in (ROOT / folder).rglob("*.py")
        if not path.is_relative_to(ROOT / "benchmarks" / "report")  # it rewrites the pages of a clone
    }
    data = {"py.typed", "constraints.txt"}
    assert code == expected | {f"gspo_kernels/{name}" for name in data}


def metadata(wheel: Path) -> Message:
    text = zipfile.ZipFile(wheel).read(f"gspo_kernels-{VERSION}.dist-info/METADATA").decode()
    return message_from_string(text)


def test_the_metadata_is_complete(distributions: dict[str, Path]) -> None:
    fields = metadata(distributions[".whl"])
    assert (fields["Name"], fields["Version"], fields["License-Expression"]) == ("gspo-kernels", VERSION, "Apache-2.0")
    assert fields["Author"] and fields["Keywords"] and "Typing :: Typed" in fields.get_all("Classifier", [])
    assert fields["Description-Content-Type"] == "text/markdown"
    # Without a public address, relative links and images would be dead.
    text, readme = str(fields.get_payload()), (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links and all(link.startswith(("https://", "#")) for link in links) and "<img" not in text
    assert {line for line in readme.splitlines() if "](" not in line and "<img" not in line} <= set(text.splitlines())


def test_with_an_address_the_links_of_the_description_are_absolute(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "source"
    shutil.copytree(source, copy, symlinks=True)
    project = (copy / "pyproject.toml").read_text()
    with_address = project.replace('# [project.urls]\n# Repository = "https://..."', ADDRESS)
    assert with_address != project
    (copy / "pyproject.toml").write_text(with_address)
    readme = (copy / "README.md").read_text()
    (copy / "README.md").write_text(
        f'{readme}\n<img src="docs/a.png"> [B](docs/b.md#c) [D](https://d.example) [E](#e)\n'
    )
    (wheel,) = build(copy, tmp_path / "dist", "--wheel").iterdir()
    text = metadata(wheel).get_payload()
    place = "https://host.example/us/gspo"
    ours = f'<img src="{place}/raw/v{VERSION}/docs/a.png"> [B]({place}/blob/v{VERSION}/docs/b.md#c)'
    assert f"{ours} [D](https://d.example) [E](#e)" in text
    assert metadata(wheel)["Project-URL"] == f"Repository, {place}"


ADDRESS = '[project.urls]\nRepository = "https://host.example/us/gspo"'


def test_the_loss_of_the_readme_runs_in_a_clean_environment(python: Path) -> None:
    code, _, comment = QUICK_START.rpartition("\n# ")
    assert comment.startswith(run(python, "-I", "-c", code).strip())


def test_the_commands_run_in_a_clean_environment(python: Path) -> None:
    gspo = python.parent / "gspo"
    assert run(gspo, "--version").strip() == f"gspo-kernels {VERSION}"
    report = run(gspo, "doctor")
    assert "Good: all" in report
    (verl,) = [line for line in report.splitlines() if line.startswith(" verl ")]
    assert verl.split()[-2:] == ["0.9.1", "==0.9.1"]  # tested, supported
    run(python, "-I", "-m", "gspo_kernels.benchmarks", "step", "--help")


def test_the_packages_of_the_wheel_can_be_imported(python: Path) -> None:
    code = f"""
import importlib, sys
from importlib.metadata import entry_points
from pathlib import Path
import gspo_kernels
from gspo_kernels.extras import MissingExtraError
assert Path(gspo_kernels.__file__).is_relative_to(sys.prefix), gspo_kernels.__file__
for name in {INTEGRATIONS!r}:
    importlib.import_module(f"gspo_kernels.integrations.{{name}}")
for name in {OF_EXTRAS!r}:
    try:
        importlib.import_module(f"gspo_kernels.integrations.{{name}}")
    except MissingExtraError as error:
        assert f"pip install 'gspo-kernels[{{name}}]'" in str(error)
(plugin,) = entry_points(group="verl.plugins", name="gspo_kernels")
plugin.load()
"""
    run(python, "-I", "-c", code)
    for name in ("gspo_kernels.tests", "gspo_kernels.benchmarks.report", "helpers"):
        assert f"No module named '{name}'" in run(python, "-I", "-c", f"import {name}", fails=True)


def test_the_tests_of_the_source_distribution_run(
    distributions: dict[str, Path], python: Path, source: Path, tmp_path: Path
) -> None:
    with tarfile.open(distributions[".gz"]) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / f"gspo_kernels-{VERSION}"
    tracked = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    absent = {name for name in tracked if not (folder / name).exists() and not name.startswith(".typings/")}
    assert absent == set()
    tests = ["tests/math/test_advantages.py", "tests/repo/test_readme.py", "tests/repo/test_imports.py"]
    # The packages of all extras need not be installed.
    options = ("-q", "-x", "-p", "no:cacheprovider", "-k", "not versions_in_the_readme")
    run(python, "-I", "-m", "pytest", *options, *tests, cwd=folder)
