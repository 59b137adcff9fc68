"""Is it right: do ranks agree, and is sharded training the same training?"""
