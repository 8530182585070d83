echo "{}" > settings.json
