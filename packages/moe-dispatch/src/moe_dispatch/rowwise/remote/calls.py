class Remote:
    @classmethod
    def of(cls, channel):
        return None
