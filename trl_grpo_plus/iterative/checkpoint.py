"""Checkpoints that are whole or not there: staged, checksummed, renamed; and the reference that TRL forgets.

A checkpoint is written to a staging directory beside its final place, gets a manifest with the size and SHA-256 of
each file, is flushed to disk and then renamed. A directory without a manifest, or with a file that does not match it,
is refused by name and the newest whole one before it is used.
"""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch
from transformers.utils import logging

logger = logging.get_logger(__name__)

MANIFEST_NAME = "manifest.json"
REFERENCE_NAME = "reference.pt"
STAGING_NAME = ".staging"
_known_sha256: dict[tuple[int, ...], str] = {}
_CHECKPOINT = re.compile(r"^checkpoint-(\d+)$")


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is half-written or damaged; the message names the directory and the file."""


def file_sha256(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def directory_digest(directory: str | Path) -> str:
    """Hex SHA-256 over the names and contents of all files below a directory, its manifest aside."""
    digest = hashlib.sha256()
    for path in _files(Path(directory)):
        digest.update(f"{path.relative_to(directory).as_posix()}\0{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def write_manifest(directory: str | Path, **extra) -> None:
    """Writes the manifest of a finished directory, and flushes all of it to disk.

    Args:
        directory: its files are listed with size and SHA-256.
        extra: further JSON values, returned by [`read_manifest`].
    """
    directory = Path(directory)
    entries = {}
    for path in _files(directory):
        _fsync(path)
        entries[path.relative_to(directory).as_posix()] = {
            "size": path.stat().st_size,
            "sha256": _written_sha256(path),
        }
    manifest = directory / MANIFEST_NAME
    manifest.write_text(json.dumps({**extra, "files": entries}, indent=1))
    _fsync(manifest)
    _fsync(directory)


def read_manifest(directory: str | Path) -> dict:
    """Reads a directory's manifest and checks every file against it.

    Raises:
        CorruptCheckpointError: no manifest, a manifest that cannot be read, or a file that is missing or differs.
    """
    directory = Path(directory)
    path = directory / MANIFEST_NAME
    if not path.is_file():
        raise CorruptCheckpointError(f"{directory} has no {MANIFEST_NAME}: it was not written to its end.")
    try:
        manifest = json.loads(path.read_text())
        entries = manifest["files"].items()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error!r}.") from error
    for name, entry in entries:
        file = directory / name
        if not file.is_file():
            raise CorruptCheckpointError(f"{directory} lacks {name}, which its manifest names.")
        if file.stat().st_size != entry["size"] or file_sha256(file) != entry["sha256"]:
            raise CorruptCheckpointError(
                f"{file} is not what was written: its size or SHA-256 differs from the manifest."
            )
    return manifest


def publish(staged: str | Path, final: str | Path) -> None:
    """Moves a finished directory to its place in one rename. One that is there already is moved aside first and
    removed.
    """
    staged, final = Path(staged), Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists():
        remove(final)
    os.rename(staged, final)
    _fsync(final.parent)


def remove(directory: str | Path) -> None:
    """Removes a directory so that a kill in between leaves nothing that looks like it."""
    directory = Path(directory)
    trash = directory.with_name(f".removed-{directory.name}")
    if trash.exists():
        shutil.rmtree(trash)
    if directory.exists():
        os.rename(directory, trash)
        shutil.rmtree(trash)


def list_checkpoints(output_dir: str | Path) -> list[Path]:
    """The directories `checkpoint-N` of a run by rising step, whole or not."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in output_dir.iterdir() if (match := _CHECKPOINT.match(path.name))]
    return [path for _, path in sorted(found) if path.is_dir()]


def last_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint whose files all match its manifest; each newer one is refused by name in a warning."""
    for path in reversed(list_checkpoints(output_dir)):
        try:
            read_manifest(path)
        except CorruptCheckpointError as error:
            logger.warning(f"Refused checkpoint {path.name}: {error}")
        else:
            return path
    return None


def prune_checkpoints(output_dir: str | Path, limit: int | None, keep: str | Path | None = None) -> list[str]:
    """Removes the oldest checkpoints with all their parts until `limit` are left; the newest and `keep` always stay.

    Returns:
        The names of those removed.
    """
    checkpoints = list_checkpoints(output_dir)
    if not limit or limit < 1:
        return []
    protected = {checkpoints[-1].name, Path(keep).name} if keep else {path.name for path in checkpoints[-1:]}
    removable = [path for path in checkpoints if path.name not in protected]
    removed = removable[: max(0, len(checkpoints) - max(limit, len(protected)))]
    for path in removed:
        remove(path)
    return [path.name for path in removed]


def reference_parameters(trainer) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] | None:
    """Parameters of the policy and of the reference, in the same order; None if the trainer has no reference that
    moves.

    With full fine-tuning the reference is TRL's `ref_model`; with PEFT it is the adapter named `ref`, and the policy
    is the adapter `default`. A PEFT policy without it is compared with its base model, which never moves.
    """
    policy = trainer.accelerator.unwrap_model(trainer.model)
    if trainer.ref_model is not None:
        reference = trainer.accelerator.unwrap_model(trainer.ref_model)
        return list(policy.parameters()), list(reference.parameters())
    if "ref" not in getattr(policy, "peft_config", {}):
        return None
    pairs = [
        (parameter, policy.get_parameter(name.replace(".default.", ".ref.")))
        for name, parameter in policy.named_parameters()
        if ".default." in name
    ]
    return [policy_parameter for policy_parameter, _ in pairs], [reference for _, reference in pairs]


def save_reference(trainer, checkpoint: str | Path) -> None:
    """Adds the reference's weights to a checkpoint. Call it on all ranks.

    TRL does not save them and loads the base model as reference on resume, even after a sync. With PEFT the adapter
    `ref` is saved by PEFT itself, so there is nothing to do.
    """
    if trainer.ref_model is None:
        return
    state = trainer.accelerator.get_state_dict(trainer.ref_model)
    if trainer.args.should_save:
        torch.save(state, Path(checkpoint) / REFERENCE_NAME)


def load_reference(trainer, checkpoint: str | Path) -> None:
    """Puts a checkpoint's reference weights into `trainer.ref_model`, in place. Call it on all ranks.

    Raises:
        CorruptCheckpointError: the checkpoint has no reference.
    """
    if trainer.ref_model is None:
        return
    path = Path(checkpoint) / REFERENCE_NAME
    if not path.is_file():
        raise CorruptCheckpointError(
            f"{checkpoint} has no {REFERENCE_NAME}, and without it the reference would silently be the base model. It "
            "was written by a trainer that does not save it; start anew, or resume with sync_ref_model=False."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if trainer.is_deepspeed_enabled and trainer.accelerator.state.deepspeed_plugin.zero_stage == 3:
        _load_partitioned(trainer.ref_model, state)
    elif trainer.is_fsdp_enabled:
        _load_sharded(trainer.ref_model, state)
    else:
        trainer.accelerator.unwrap_model(trainer.ref_model).load_state_dict(state)


def _load_partitioned(model, state):
    import deepspeed

    module = getattr(model, "module", model)
    with deepspeed.zero.GatheredParameters(list(module.parameters()), modifier_rank=0):
        if deepspeed.comm.get_rank() == 0:
            module.load_state_dict(state)


def _load_sharded(model, state):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and path != directory / MANIFEST_NAME)


def _written_sha256(path: Path) -> str:
    """The SHA-256 of a file that this process wrote; one that is linked into many checkpoints is read once."""
    status = path.stat()
    identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
    if identity not in _known_sha256:
        _known_sha256[identity] = file_sha256(path)
    return _known_sha256[identity]


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
