"""Text.

characters    which character comes next?
translation   a line into another: translation_decoding, and its data:
              parallel_text, written_dates, vocabularies
text_files    reads the file of either
"""
