import sys
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
# Shapes and dtypes of the core's signatures are checked whenever a test traces it.
CHECKED = ["core.sampling", "core.rules", "core.verification", "core.decoding"]
install_import_hook([f"speccascade_jax.{name}" for name in CHECKED], "checking.typechecker")


@pytest.fixture(autouse=True, scope="session")
def compile_once(tmp_path_factory):
    """Programs that several tests compile again come from a cache on disk."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="decode 1,000 test sentences with the shipped pair")
