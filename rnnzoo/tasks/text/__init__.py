"""Text.

language      which token comes next? tokens: characters, bytes, subwords
translation   a line into another: translation_decoding, vocabularies
files         reads the files of both, and writes dates to translate
"""
