"""Skeleton action recognition: NTU RGB+D 60 and 120.

skeletons        the task
skeleton_frames  sampling of frames, augmentation
skeleton_inputs  of a trained model: from .skeleton files, or arrays, checked
ntu_files        one .skeleton file
ntu_conversion   many of them to one array, `python -m`
ntu_arrays       that array
ntu_splits       who trains and who tests
ntu_motions      synthetic recordings
"""
