import pytest


@pytest.fixture(scope="session")
def sandbox():
    """Skips where programs cannot be run in a sandbox (.ci/run installs bubblewrap)."""
    from speccascade_jax.evaluation.sandbox import check_sandbox

    try:
        check_sandbox()
    except ValueError as error:
        pytest.skip(str(error))
