"""Upload a folder to a repository of the hub."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo


def push_folder(
    save: Callable[[str], object],
    repo_id: str,
    *,
    commit_message: str,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> "CommitInfo":
    """Upload the files that `save` writes into a folder, in one commit; see `bertlite.BertModel.push_to_hub`.

    The hub is not touched before the files are written.
    """
    from huggingface_hub import HfApi

    with TemporaryDirectory(prefix="bertlite-") as parent:
        folder = Path(parent) / "checkpoint"
        save(str(folder))
        api = HfApi(token=token)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not create_pr:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=commit_message, revision=revision, create_pr=create_pr
        )
