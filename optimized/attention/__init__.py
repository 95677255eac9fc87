"""The two kernels of masked MHA behind one signature: `triton_masked_mha` and `fa4_masked_mha`."""
