"""Text.

characters    which character comes next?
translation   a line into another: translation_decoding, vocabularies
files         reads the files of both, and writes dates to translate
"""
