"""How near two pictures are."""

import math
from typing import Any

import numpy as np


def similarity(image: np.ndarray, reference: np.ndarray) -> tuple[float | None, float | None]:
    """PSNR in dB (None for equal pixels) and SSIM (None without scikit-image) of two uint8
    [H, W, 3] pictures."""
    error = float(np.mean((image.astype(np.float64) - reference.astype(np.float64)) ** 2))
    psnr = 10 * math.log10(255**2 / error) if error else None
    return psnr, _ssim(image, reference)


def _ssim(image: np.ndarray, reference: np.ndarray) -> float | None:
    metrics = _metrics()
    if metrics is None:
        return None
    return float(metrics.structural_similarity(reference, image, channel_axis=2))


def _metrics() -> Any:
    try:
        from skimage import metrics
    except ImportError:  # a test dependency: a long measurement does not end for want of it
        return None
    return metrics
