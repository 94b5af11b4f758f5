"""Skeleton action recognition: NTU RGB+D 60 and 120.

skeletons        the task
skeleton_inputs  sampling of frames, augmentation, and what `predict` takes
ntu_files        .skeleton files: found and read
ntu_conversion   many of them to one array, `python -m`
ntu_arrays       that array, and who trains and who tests
ntu_motions      synthetic recordings
"""
