"""What is checked: that ranks have the same model, and that gradients are finite and averaged."""
