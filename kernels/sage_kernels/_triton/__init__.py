"""All @triton.jit code and its launchers: the only folder that imports triton."""
