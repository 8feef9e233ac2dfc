"""The comparison of ways to prune to a share of the MACs, without training."""
