"""Hashes know their parts, and errors name the file that was to be written."""

import re
from pathlib import Path

import pytest

from bertlite.checkpoint.folders import replacing
from bertlite.support.files import naming, sha256, sha256_of, write_json, write_text


def test_a_hash_knows_where_its_parts_end(tmp_path):
    write_text(tmp_path / "file", "ab")
    assert sha256_of("ab", "c") != sha256_of("a", "bc")
    assert sha256_of("ab") == sha256_of(b"ab") == sha256_of(tmp_path / "file")
    write_text(tmp_path / "file", "abc")
    wanted = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, appendix B.1
    assert sha256("abc") == sha256(b"abc") == sha256(tmp_path / "file") == wanted


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that nobody can write, root included")
def test_an_error_names_the_file_and_not_the_temporary_one() -> None:
    with pytest.raises(OSError, match=r": '/proc/record\.json'$"):
        write_json("/proc/record.json", {})
    with pytest.raises(OSError, match=r"/proc/model\b"), replacing(Path("/proc/model"), re.compile("x")):
        pass
    path = Path("/there/shard.parquet")
    with pytest.raises(PermissionError, match=r"Permission denied: '/there/shard\.parquet'$"), naming(path):
        raise PermissionError(13, "Failed to open local file '/there/.shard.parquet.12ab.tmp'")
    with pytest.raises(OSError, match=r"No space left on device: '/there/shard\.parquet'$"), naming(path):
        raise OSError(28, "No space left on device")
    with pytest.raises(PermissionError, match="another"), naming(path):
        raise PermissionError(13, "Permission denied", "another")
