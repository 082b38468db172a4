"""One layer's attention as an operator that is asked: dense, tiled or uniform."""
