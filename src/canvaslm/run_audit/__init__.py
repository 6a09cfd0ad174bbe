"""Is a finished run what it says it is, before anybody reads its loss?"""
