"""The project's images without a Docker daemon or a registry.

Each image is what its Dockerfile describes: Debian's base by ``debootstrap``, the packages its
extra needs as this environment has them, the folders it copies. Nothing but Debian's packages comes
over the network. The result is an OCI archive for ``ctr --namespace k8s.io images import``,
``docker load`` or ``podman load``.
"""

from tools.images.archive import Image
from tools.images.build import IMAGES, BuiltImage, build_images, make_images

__all__ = ["IMAGES", "BuiltImage", "Image", "build_images", "make_images"]
