"""The privacy mechanisms of Flower and NVFlare, to audit as `function:leakgauge.deployed.NAME`."""

from leakgauge.harness.integrations.deployed import flower_adaptive as flower_adaptive
from leakgauge.harness.integrations.deployed import flower_clipping as flower_clipping
from leakgauge.harness.integrations.deployed import flower_local_dp as flower_local_dp
from leakgauge.harness.integrations.deployed import flower_secagg as flower_secagg
from leakgauge.harness.integrations.deployed import nvflare_exclude_vars as nvflare_exclude_vars
from leakgauge.harness.integrations.deployed import nvflare_gaussian as nvflare_gaussian
from leakgauge.harness.integrations.deployed import nvflare_percentile as nvflare_percentile
from leakgauge.harness.integrations.deployed import nvflare_svt as nvflare_svt

__all__ = [
    "flower_adaptive",
    "flower_clipping",
    "flower_local_dp",
    "flower_secagg",
    "nvflare_exclude_vars",
    "nvflare_gaussian",
    "nvflare_percentile",
    "nvflare_svt",
]
