"""INT8 attention and an INT8 KV cache for transformers models.

May import options and the files beside it, linears, sage_kernels and transformers.
"""

from ..installation import pip_install


try:
    import transformers.modeling_utils  # noqa: F401 (attention.py is imported as soon as this one is there)

    from . import masks  # noqa: F401 (older versions of transformers lack what it imports)
except ImportError as error:
    raise ImportError(
        f"sage_processors needs transformers 5.10.1 or newer for this: {pip_install('transformers')}"
    ) from error
