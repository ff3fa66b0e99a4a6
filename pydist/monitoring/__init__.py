"""What a training run writes about itself while it goes on: `pydist.monitor`."""
