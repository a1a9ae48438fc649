"""`local` PersistentVolumes on the one node, made beforehand: there is no provisioner."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.cluster.node import NODE_NAME

STORAGE_CLASS = "local"


def storage_class() -> dict[str, Any]:
    """The class of all these volumes, taken where a claim names none."""
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {
            "name": STORAGE_CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": "kubernetes.io/no-provisioner",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def persistent_volume(name: str, folder: Path, size: str) -> dict[str, Any]:
    """A volume over a folder; unlike hostPath it heeds a pod's fsGroup."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": size},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": STORAGE_CLASS,
            "local": {"path": str(folder)},
            "nodeAffinity": {
                "required": {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {
                                    "key": "kubernetes.io/hostname",
                                    "operator": "In",
                                    "values": [NODE_NAME],
                                }
                            ]
                        }
                    ]
                }
            },
        },
    }


def make_folder(folder: Path) -> Path:
    """Make a volume's folder, empty and root's own, as a fresh disk is."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder
