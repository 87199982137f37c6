"""INT8 attention as a node of ComfyUI: put this folder into `custom_nodes`."""

from .sage_int8_attention import SageInt8Attention, SageInt8AttentionReport


NODE_CLASS_MAPPINGS = {
    "SageInt8Attention": SageInt8Attention,
    "SageInt8AttentionReport": SageInt8AttentionReport,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SageInt8Attention": "INT8 attention (sage_processors)",
    "SageInt8AttentionReport": "INT8 attention: what really ran",
}
__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
