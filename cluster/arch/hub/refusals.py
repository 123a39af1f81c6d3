"""Error messages for hub models that cannot be fetched; each says what to do."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from huggingface_hub import HfApi, constants, errors
from huggingface_hub.utils import get_token

from cluster.arch.hub.names import HubModel
from cluster.config import ConfigError

logger = logging.getLogger(__name__)

REVISIONS_SHOWN = 5  # at most 5 branches and 5 tags
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_ACCESS_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def explain_failures(model: HubModel) -> Iterator[None]:
    """A context manager: turns failures of the hub, the network or the disk into a ConfigError. Its message says what
    was tried, what went wrong and what to do.
    """
    try:
        yield
    except Exception as error:
        if not _is_from_outside(error):
            raise
        logger.debug("%s could not be fetched", model.display_name, exc_info=True)
        raise ConfigError(f"{_failure_prefix(model)}: {_failure_reason(model, error)}") from None


def _is_from_outside(error: Exception) -> bool:
    """Whether the error comes from the disk, the library `huggingface_hub`, or the library's HTTP client."""
    return isinstance(error, OSError) or type(error).__module__.startswith(("huggingface_hub", "http"))


def not_cached_error(model: HubModel, missing: list[str]) -> ConfigError:
    """Return the error for a model whose `missing` files are not in the cache while the hub may not be contacted. If
    `missing` is empty, nothing of the model is in the cache.
    """
    what_is_missing = (
        f"lacks {', '.join(missing[:3])}{' and others' if missing[3:] else ''} of it" if missing else "lacks it"
    )
    return ConfigError(f"{_failure_prefix(model)}: {_offline_reason(model, what_is_missing)}")


def _failure_prefix(model: HubModel) -> str:
    return (
        f"model folder {model.name!r} does not exist, and {model.display_name} cannot be had from {constants.ENDPOINT}"
    )


def _offline_reason(model: HubModel, what_is_missing: str) -> str:
    return (
        f"HF_HUB_OFFLINE is set, and the cache in {constants.HF_HUB_CACHE!r} {what_is_missing}; give a folder, unset "
        f"HF_HUB_OFFLINE, or fill the cache where there is a network: hf download {model.name} --revision "
        f"{model.commit or model.revision}"
    )


def _failure_reason(model: HubModel, error: Exception) -> str:
    """Return what went wrong and what to do, from the first known error in the chain of causes."""
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, errors.HfHubHTTPError):
            return _response_reason(model, cause)
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return _offline_reason(model, "lacks it")
        if isinstance(cause, OSError) and cause.errno in DISK_FULL_ERRNOS:
            return (
                f"{cause.filename or constants.HF_HUB_CACHE!r} cannot be written: {cause.strerror}; make room there, "
                "or set HF_HOME, or TMPDIR for temporary files, to a folder on another disk. Files that are whole are "
                "kept"
            )
        if isinstance(cause, OSError) and cause.errno in NO_ACCESS_ERRNOS:
            return (
                f"{cause.filename or constants.HF_HUB_CACHE!r} cannot be written: {cause.strerror}; set HF_HOME to a "
                "folder that can"
            )
        if "Consistency check failed" in str(cause):
            return f"{_first_line(cause)} The file is not kept; start again, or look for a proxy or mirror that cuts it"
    root = causes[-1]
    return (
        f"the hub cannot be reached ({type(root).__name__}: {_first_line(root)}); check the network, proxies and "
        "HF_ENDPOINT, or give a folder. A model that is whole in the cache is served without a network"
    )


def _response_reason(model: HubModel, error: errors.HfHubHTTPError) -> str:
    """Return what the hub's error response means, and what to do."""
    token = "HF_TOKEN, or `hf auth login`," if get_token() is None else "the token that is set"
    model_page = f"{constants.ENDPOINT}/{model.name}"
    if isinstance(error, errors.GatedRepoError):
        remedy = "set HF_TOKEN to a token of that account" if get_token() is None else "use a token of that account"
        return f"it is gated: accept its licence at {model_page} and {remedy}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {model.revision!r}{_existing_revisions(model)}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"no such model is there, or it is private; check the name, and that {token} may read it"
    status = error.response.status_code
    if status in (401, 403):
        return f"the hub answers {status} ({_first_line(error)}); check that {token} may read it"
    return f"the hub answers {status} ({_first_line(error)}); try again later"


def _existing_revisions(model: HubModel) -> str:
    """Return the end of a sentence that lists some existing revisions or, if the hub does not list them, names the page
    that shows them.
    """
    with suppress(Exception):  # the error message makes sense without this list
        refs = HfApi().list_repo_refs(model.name)
        parts = []
        for kind, refs_of_kind in (("branches", refs.branches), ("tags", refs.tags)):
            if refs_of_kind:
                ellipsis = ", ..." if len(refs_of_kind) > REVISIONS_SHOWN else ""
                parts.append(f"{kind} {', '.join(ref.name for ref in refs_of_kind[:REVISIONS_SHOWN])}{ellipsis}")
        if parts:
            return f"; it has {' and '.join(parts)}"
    return f"; see {constants.ENDPOINT}/{model.name}/tree/main"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no details")


def disk_full_error(model: HubModel, needed_bytes: int, free_bytes: int, disk_folder: Path) -> ConfigError:
    """Return the error for a disk that is too small, detected before the download."""
    return ConfigError(
        f"{model.display_name} needs {needed_bytes / 1e9:.2f} GB in {constants.HF_HUB_CACHE!r}, and the disk of "
        f"{str(disk_folder)!r} has {free_bytes / 1e9:.2f} GB free; make room there, or set HF_HOME to a "
        "folder on another disk"
    )


def damaged_error(model: HubModel, mismatches: dict[str, tuple[str, str]]) -> ConfigError:
    """Return the error for downloads with wrong hashes. `mismatches` maps the name of a file to (the file's hash, the
    hub's hash).
    """
    files = "; ".join(
        f"{name} has hash {actual_hash}, and {expected_hash} is listed"
        for name, (actual_hash, expected_hash) in mismatches.items()
    )
    return ConfigError(
        f"{model.display_name} from {constants.ENDPOINT} arrived damaged: {files}. What is damaged has been removed; "
        "start again to download it anew, and if that fails as well, look for a proxy or mirror that serves other files"
    )
