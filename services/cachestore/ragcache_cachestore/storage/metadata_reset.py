"""Opens the metadata. If it is damaged, it is set aside, and the folder starts empty.

Everything in the store can be computed again, so a person must not be needed to empty a volume. The
damaged files are kept for a look at them, but only those of the last reset. The values are removed,
because nothing tells any more where each of them is. So a reset never needs more of the volume.
"""

from __future__ import annotations

import logging
import shutil

from ragcache_cachestore.storage.data_dir import DataDir
from ragcache_cachestore.storage.metadata_db import DamagedMetadata, DataReset, MetadataDb

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 500


def open_metadata(data_dir: DataDir, now_ms: int) -> MetadataDb:
    """Open the metadata of a data folder.

    Args:
        now_ms: Unix time in milliseconds.

    Raises:
        InvalidInput: It cannot be opened for another reason than damage, or not be set aside.
    """
    try:
        return _open_verified(data_dir)
    except DamagedMetadata as damage:
        log.error(  # noqa: TRY400
            "recovery: the metadata is damaged, so the folder starts empty moved_to=%s error=%s",
            data_dir.damaged_metadata,
            damage,
        )
        try:
            shutil.rmtree(data_dir.damaged_metadata, ignore_errors=True)
            data_dir.metadata.rename(data_dir.damaged_metadata)
            data_dir.values.unlink(missing_ok=True)
        except OSError as error:
            raise damage from error
        metadata = _open_verified(data_dir)
        metadata.note_reset(DataReset(now_ms, damage.problem[:MAX_REASON_CHARS]))
        return metadata


def _open_verified(data_dir: DataDir) -> MetadataDb:
    metadata = MetadataDb(data_dir.metadata)
    try:
        metadata.verify()
    except BaseException:
        metadata.close()
        raise
    return metadata
