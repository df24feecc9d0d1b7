"""The main job: a small language model is post-trained while its life cycle is watched, measured and drawn."""
