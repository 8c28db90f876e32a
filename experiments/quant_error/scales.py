"""Static scales of every arm that has them, from one observation that stays in the result folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from page4.experiments.calibrate.state import Observed, load, save
from page4.experiments.calibrate.windows import Window
from page4.experiments.quant_error.config import Arm, QuantErrorConfig
from page4.experiments.result_folder import ResultFolder
from page4.kvcache import KVScales
from page4.model import Qwen4ExpForCausalLM
from page4.spec_decode import observe_texts

ScalesByArm = Mapping[Arm, KVScales | None]


def arm_scales(
    config: QuantErrorConfig, model: Qwen4ExpForCausalLM, windows: Sequence[Window], results: ResultFolder
) -> ScalesByArm:
    """Scales by arm, None of a format without static ones; `scales.json` gets them.

    K and V are observed once; a resumed study takes what the first run saw.

    Raises:
        InputError: The observation in the folder is damaged, or a layer saw nothing but zeros.
    """
    scales: dict[Arm, KVScales | None] = dict.fromkeys(config.arms)
    if windows:
        observed = load(results.path)
        if observed is None:
            texts = [window.tokens for window in windows]
            observed = Observed(observe_texts(model, texts), len(texts), sum(map(len, texts)), len(texts))
            save(results.path, observed)
        assert observed.observation is not None
        for arm in config.arms:
            if arm.rule is not None:
                scales[arm] = observed.observation.scales(arm.kv_format, arm.rule, config.percent)
    content = {arm.name: dataclasses.asdict(found) for arm, found in scales.items() if found is not None}
    results.write_json("scales.json", content)
    return scales
