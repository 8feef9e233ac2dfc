"""The real libraries that people use BERT through, with bertlite.hf in it; `checks` says what each must do."""

import pytest

pytest.importorskip("transformers")

from checks import CHECKS, OURS, MissingError


@pytest.mark.clients
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the libraries call what transformers will drop
@pytest.mark.parametrize("name", CHECKS)
def test_a_client_gets_what_it_expects(name, tmp_path):
    try:
        assert CHECKS[name].run(OURS, tmp_path / "run"), "a check returns what it saw"
    except MissingError as missing:
        pytest.skip(str(missing))
