"""From overlays to the static scales of a cache: what its formats need, and nothing that they do not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from page4.kernels.errors import InputError

from .formats import KVFormat, get_format
from .layer_formats import LayerFormats, draft_format, scales_of
from .overlay import Overlay, OverlayBase
from .overlay_manifest import is_prototype
from .scales import UNIT_SCALES, KVScales, ScalePair


class PrototypeScales(UserWarning):
    """Scales that nobody measured are in use."""


def overlay_scales(
    overlays: Mapping[str, Overlay],
    base: OverlayBase,
    kv_format: str,
    draft_kv_format: str | None = None,
    allow_unit_target_scales: bool = False,
) -> KVScales:
    """The scales of every layer and of the draft, each from the overlay of its own format.

    Args and errors: see :func:`scales_by_format`.
    """
    found = scales_by_format(overlays, base, kv_format, draft_kv_format, allow_unit_target_scales)
    target = LayerFormats(kv_format)
    draft = draft_format(target, draft_kv_format) if base.has_draft else get_format("fp16")
    scales = scales_of(target, draft, base.layers, found)
    assert scales is not None  # one of them needs some, else nothing was found
    return scales


def scales_by_format(
    overlays: Mapping[str, Overlay],
    base: OverlayBase,
    kv_format: str,
    draft_kv_format: str | None = None,
    allow_unit_target_scales: bool = False,
) -> dict[str, KVScales]:
    """What each static format of a target and a draft takes from its overlay, by name of the format.

    A format that the target uses gets the scales of all QSA layers, one that the draft uses the draft's.

    Args:
        overlays: of one checkpoint, by format.
        base: that checkpoint.
        kv_format: the target's, of all layers or by layer, see :class:`LayerFormats`.
        draft_kv_format: the target's default if None.
        allow_unit_target_scales: take 1.0 for every target layer if an overlay has no target scales; a
            warning says so.
    Raises:
        InputError: scales that a format needs are missing, all overlays are for other formats, or neither
            target nor draft needs any: formats that compute scales as they write, for example.
    """
    chosen = LayerFormats(kv_format)
    users = [("target", used) for used in dict.fromkeys(chosen.of(base.layers))]
    draft = draft_format(chosen, draft_kv_format)
    if base.has_draft:
        users.append(("draft", draft))
    for whose, used in users:
        _check_format(overlays, whose, used)
    static = [(whose, used.name) for whose, used in users if used.needs_scale]
    if not static:
        raise InputError(f"KV format {kv_format} has no static scales: leave out the overlay")
    found = {}
    for name in dict.fromkeys(name for _, name in static):
        overlay = overlays[name]
        needs_target, needs_draft = ("target", name) in static, ("draft", name) in static
        if needs_draft and overlay.draft is None:
            raise InputError("the overlay has 0 of 2 draft scales, and the draft's format needs both")
        found[name] = KVScales(
            _target_scales(overlay, base, allow_unit_target_scales) if needs_target else (),
            overlay.draft if needs_draft else None,
        )
    for whose, name in static:
        manifest = overlays[name].manifest
        source = manifest.target if whose == "target" else manifest.draft
        if is_prototype(source):
            _warn(f"prototype scales of the {whose} ({source}): they were not measured on its layers")
    return found


def _check_format(overlays: Mapping[str, Overlay], whose: str, used: KVFormat) -> None:
    if used.has_token_scales:
        raise InputError(
            f"KV format {used.name} of the {whose} computes its scales as it writes: an overlay of "
            "static scales cannot be used beside it"
        )
    if used.needs_scale and used.name not in overlays:
        whole = "overlay's" if len(overlays) == 1 else "overlays'"
        raise InputError(
            f"the {whole} scales are made for {' and '.join(overlays)}, the {whose}'s KV format "
            f"is {used.name}"
        )


def _target_scales(overlay: Overlay, base: OverlayBase, allow_unit: bool) -> tuple[ScalePair, ...]:
    if overlay.target:
        return tuple(overlay.target[layer] for layer in base.layers)
    if not allow_unit:
        raise InputError(
            f"the overlay has 0 of {2 * len(base.layers)} target scales; "
            "allow_unit_target_scales would take 1.0"
        )
    _warn(f"no target scales: 1.0 is used for all of {len(base.layers)} QSA layers")
    return (UNIT_SCALES,) * len(base.layers)


def _warn(message: str) -> None:
    warnings.warn(message, PrototypeScales, stacklevel=4)
