"""canvaslm: can a block-diffusion model replace an autoregressive one on your data?"""
