# The server, without torch.
FROM python:3.12-slim

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ampwatch ampwatch
COPY server server
COPY dashboard dashboard
RUN pip install --no-cache-dir '.[server,postgres]' && rm -rf /src

RUN useradd --create-home ampwatch \
    && install --directory --owner=ampwatch --mode=0700 /home/ampwatch/.config/ampwatch
USER ampwatch
WORKDIR /home/ampwatch

EXPOSE 8765
ENTRYPOINT ["ampwatch"]
CMD ["serve", "--host=0.0.0.0", "--port=8765"]
