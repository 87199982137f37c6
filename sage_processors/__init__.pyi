"""Public names for type checkers. At run time __init__.py imports them on first use."""

from typing import Any

from . import pipelines as pipelines
from .calibration.policy_files import read_policy as read_policy
from .calibration.search import Calibration as Calibration
from .calibration.search import calibrate as calibrate
from .diffusion.by_name import processors_for as processors_for
from .diffusion.calls.backend import register_diffusers_backend as register_diffusers_backend
from .diffusion.calls.backend import unregister_diffusers_backend as unregister_diffusers_backend
from .diffusion.calls.sage_class import sage_class as sage_class
from .diffusion.handle import Handle as Handle
from .diffusion.reports.backend_report import BackendReport as BackendReport
from .diffusion.reports.backend_report import diffusers_backend_report as diffusers_backend_report
from .diffusion.reports.probe import Probe as Probe
from .diffusion.reports.report import Report as Report
from .entry import apply as apply
from .entry import handle_of as handle_of
from .evaluation import feature_distance as feature_distance
from .evaluation import hard_variants as hard_variants
from .evaluation import metrics as metrics
from .evaluation import quality as quality
from .evaluation import videos as videos
from .language.attention import attention_report as attention_report
from .language.attention import register_transformers as register_transformers
from .language.generation.handle import LanguageHandle as LanguageHandle
from .language.kv_cache import Int8KVCache as Int8KVCache
from .language.quantized_kv import Int8KVCacheError as Int8KVCacheError
from .linears.quantize import quantize_linears as quantize_linears
from .linears.swap import LinearSwap as LinearSwap
from .loading.config import SageConfig as SageConfig
from .option_groups import Keep as Keep
from .option_groups import LayerRule as LayerRule
from .option_groups import Linears as Linears
from .option_groups import Scaling as Scaling
from .option_groups import Skip as Skip
from .options import SageAttnProcessor as SageAttnProcessor
from .postponed.tensor import ChangedInputError as ChangedInputError
from .unsupported import UnsupportedAttentionError as UnsupportedAttentionError
from .unsupported import UnsupportedLinearError as UnsupportedLinearError
from .version import __version__ as __version__

__all__: list[str]

def __getattr__(name: str) -> Any: ...  # Sage<Name> of any processor class of diffusers
