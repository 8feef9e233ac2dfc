"""Run transformers' own tests of BERT with bertlite's classes in place of its own.

    python -m scripts.stress.hf_suites

The installed transformers needs the tests of its own version: an archive named like 5.24.0.tar.xz, in the folder that
BERTLITE_PEER_SUITES names, by default ../shared/peer_suites, next to the checkout.  A clone of transformers makes it:

    git archive --prefix 5.24.0/ v5.24.0 conftest.py pyproject.toml tests utils | xz >5.24.0.tar.xz

Takes a minute, and the packages `parameterized` and `httpx`.  Exits with the status of pytest.  If there is no
archive, a line says so, and the status is 0.  pytest loads this module as a plugin, which replaces the classes.
"""

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/models/bert/test_modeling_bert.py"
NEEDS_THE_HUB = f"{TESTS}::BertModelIntegrationTest::test_sdpa_ignored_mask"


def pytest_configure() -> None:
    """Make every name by which transformers knows a BERT class mean bertlite's, in this process."""
    import transformers
    from transformers.models.bert import modeling_bert

    from bertlite import hf

    for name, ours in vars(hf).items():
        if isinstance(ours, type) and issubclass(ours, transformers.PreTrainedModel):
            for module in (transformers, transformers.models.bert, modeling_bert):
                setattr(module, name, ours)
    hf.register()

    # 4.57.6's tests of other models, which are imported too, read sounds and images by this package.
    if find_spec("datasets") is None:
        stand_in: Any = ModuleType("datasets")
        stand_in.__spec__ = ModuleSpec("datasets", None)
        stand_in.Audio = stand_in.load_dataset = None
        sys.modules["datasets"] = stand_in


def run_tests(archive: Path, transformers: Path) -> int:
    """Unpack the tests of transformers, whose package is a folder, and return the status of pytest."""
    options = ["-q", "-o", "log_cli=false", "-W", "ignore", "-p", "no:cacheprovider", "--deselect", NEEDS_THE_HUB]
    command = [sys.executable, "-m", "pytest", TESTS, *options, "-p", "scripts.stress.hf_suites"]
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        work = Path(folder, archive.name.removesuffix(".tar.xz"))
        (work / "src").mkdir()
        (work / "src" / "transformers").symlink_to(transformers)  # some tests read its sources there

        given = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
        env = {**given, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "TMPDIR": folder}
        return subprocess.run(command, cwd=work, env=env, check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)

    import transformers

    named = os.environ.get("BERTLITE_PEER_SUITES")
    if named is not None and not Path(named).is_dir():
        sys.exit(f"BERTLITE_PEER_SUITES names {named}, which is no folder; unset it, or name one with archives")
    archive = Path(named or ROOT.parent / "shared" / "peer_suites", f"{transformers.__version__}.tar.xz")
    if not archive.is_file():
        print(f"there is no {archive}, so transformers' own tests were not run")
        return 0
    return run_tests(archive, Path(transformers.__file__).parent)


if __name__ == "__main__":
    raise SystemExit(main())
