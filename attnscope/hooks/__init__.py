"""Where attnscope meets a running model: its attention calls as they are made, checked, and who computes them."""
