"""Tasks whose data are made from a seed: memory, and the state of a language.

made            the part that all have in common
adding          the adding problem
copying         copy memory, selective copying
state_tracking  regular languages and word problems of groups; accuracy over
                length
languages       their automata
"""
