"""The high tier's switch: fusions that round differently, on only while a request asks for it.

A model marks the modules where such a fusion could run. The denoising stage mounts the fusion on
a transformer at a batch boundary, all sites or none, and unmounts it after. Sites start unmounted.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

RejectReason = Callable[[nn.Module, Mapping[str, Any]], str | None]


class QualityGatedFusion:
    """One opt-in fusion: its marked sites and whether they are mounted.

    name: what the report calls it.
    marker_attr, enabled_attr: attributes that `mark` and `mount` set on a site. Plain Python
        attributes: a state dict does not see them.
    mount_message: the one INFO line of a mount; "Mounted <name> for quality=high" if not given.
    last_reject: why the latest `mount` enabled nothing, or None if it enabled the sites.
    """

    def __init__(
        self, *, name: str, marker_attr: str, enabled_attr: str, mount_message: str | None = None
    ) -> None:
        self.name = name
        self.marker_attr = marker_attr
        self.enabled_attr = enabled_attr
        self.mount_message = mount_message or f"Mounted {name} for quality=high"
        self.last_reject: str | None = None

    def mark(self, module: nn.Module, **metadata: Any) -> None:
        """Make `module` a site, unmounted; `metadata` is handed to the reject reason."""
        setattr(module, self.marker_attr, metadata)
        setattr(module, self.enabled_attr, False)

    def metadata(self, module: nn.Module) -> Mapping[str, Any]:
        """What `mark` was given for `module`; raises ValueError when it is no site."""
        if not self._is_site(module):
            raise ValueError(f"{type(module).__name__} is not marked as a site of {self.name}")
        return getattr(module, self.marker_attr)

    def is_enabled(self, module: nn.Module) -> bool:
        """Whether the fusion is mounted on `module` now; False for a module that is no site."""
        return module.__dict__.get(self.enabled_attr, False)

    def iter_sites(self, root: nn.Module) -> Iterator[nn.Module]:
        """The marked modules in `root`, itself included, in module order."""
        return (module for module in root.modules() if self._is_site(module))

    def mount(self, root: nn.Module, reject_reason: RejectReason | None = None) -> bool:
        """Enable every site in `root`, or none: True when all are enabled.

        `reject_reason(site, metadata)` says why a site cannot run fused, or None if it can. One
        rejected site, or no site at all, leaves nothing enabled and sets `last_reject`; an
        exception of `reject_reason` propagates and leaves nothing enabled either. Mounting
        what is mounted changes nothing and logs nothing.
        """
        was_mounted = all(map(self.is_enabled, self.iter_sites(root)))
        self.unmount(root)
        self.last_reject = self._first_reject(root, reject_reason)
        if self.last_reject is not None:
            return False
        self._set_enabled(root, True)
        if not was_mounted:
            logger.info(self.mount_message)
        return True

    def unmount(self, root: nn.Module) -> None:
        """Disable every site in `root`."""
        self._set_enabled(root, False)

    def _first_reject(self, root: nn.Module, reject_reason: RejectReason | None) -> str | None:
        found = False
        for path, module in root.named_modules():
            if not self._is_site(module):
                continue
            found = True
            reason = reject_reason(module, self.metadata(module)) if reject_reason else None
            if reason is not None:
                return f"{path or 'root'}: {reason}"
        return None if found else f"no module is marked for {self.name}"

    def _is_site(self, module: nn.Module) -> bool:
        return self.marker_attr in module.__dict__

    def _set_enabled(self, root: nn.Module, enabled: bool) -> None:
        for module in self.iter_sites(root):
            setattr(module, self.enabled_attr, enabled)
