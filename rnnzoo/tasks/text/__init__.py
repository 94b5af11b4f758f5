"""Text.

language      which token comes next? tokens: characters, bytes, subwords
text_stream   the same with windows that go on, and AWD-LSTM's model
translation   a line into another: translation_decoding, vocabularies
files         reads the files of all, and writes dates to translate
"""
