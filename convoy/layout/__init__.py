"""Describe tensor layouts (which device holds which part) and the transfers that move a tensor to another layout."""
