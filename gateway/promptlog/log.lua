-- How each script of this room begins: the clock, and a log's bytes counted as entries come and go.
--
-- KEYS  1 the tenant's log, a stream  2 its account
-- ARGV  1 clock offset in ms (0 but in tests)  2 what the names of the tenant's other keys begin with
--
-- An entry of the stream has r, its request's id; m, its sealed metadata; n, its bytes. Beside it is a hash, named by
-- the request's id, with q and a, the sealed bodies; f, sealed feedback; s, the entry's place in the stream; n, the
-- bytes of both. The account has bytes, the sum of n over the stream; keep, the retention by which the hashes expire;
-- late, the longest time from a request's admission to its place in the stream, ms; and from, if Redis evicted it: then
-- entries before that place are not counted yet.

-- Negate by subtracting from 0: -0 would become "-0", which is no integer to Redis.
local function text(number)
  return string.format('%.0f', number)
end

local clock = redis.call('TIME')
local offset, prefix = tonumber(ARGV[1]), ARGV[2]
local now = tonumber(clock[1]) * 1000 + math.floor(tonumber(clock[2]) / 1000) + offset
local OVERHEAD = 512 -- what Redis needs for an entry beside what is written, about

local function hash_of(request)
  return prefix .. 'e:' .. request
end

local function place(id)
  local ms, seq = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(ms), tonumber(seq)
end

local function before(one, other)
  local ms, seq = place(one)
  local other_ms, other_seq = place(other)
  return ms < other_ms or (ms == other_ms and seq < other_seq)
end

local function field(entry, name)
  for index = 1, #entry[2], 2 do
    if entry[2][index] == name then
      return entry[2][index + 1]
    end
  end
end

local function bytes()
  return tonumber(redis.call('HGET', KEYS[2], 'bytes') or '0')
end

-- Redis may have evicted the account alone: what is in the stream then is counted later, by trim.lua.
if redis.call('EXISTS', KEYS[2]) == 0 then
  local newest = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)[1]
  if newest then
    local ms, seq = place(newest[1])
    redis.call('HSET', KEYS[2], 'bytes', '0', 'late', '86400000', 'from', text(ms) .. '-' .. text(seq + 1))
  end
end

local function count(number)
  return redis.call('HINCRBY', KEYS[2], 'bytes', text(number))
end

-- The entry's bodies and its bytes; the caller takes it from the stream.
local function forget(entry)
  local hash = hash_of(field(entry, 'r'))
  local size
  if redis.call('HGET', hash, 's') == entry[1] then
    size = redis.call('HGET', hash, 'n')
    redis.call('UNLINK', hash)
  end
  local from = redis.call('HGET', KEYS[2], 'from')
  if not from or not before(entry[1], from) then
    count(0 - tonumber(size or field(entry, 'n')))
  end
end

local function tidy()
  if redis.call('XLEN', KEYS[1]) == 0 then
    redis.call('DEL', KEYS[1], KEYS[2])
  end
end

-- What is older than keep ms goes, and the oldest while there are more than most_bytes; at most so many entries.
-- Returns how many went, and whether there may be more.
local function trim(keep, most_bytes, most)
  local gone, last = 0, nil
  local more = true
  while more and gone < most do
    local oldest = redis.call('XRANGE', KEYS[1], last and '(' .. last or '-', '+', 'COUNT', 50)
    more = #oldest > 0
    for _, entry in ipairs(oldest) do
      local total = bytes()
      if gone >= most then
        break
      elseif place(entry[1]) > now - keep and total <= most_bytes then
        more = false
        break
      end
      forget(entry)
      last = entry[1]
      gone = gone + 1
    end
  end
  if last then
    local ms, seq = place(last)
    redis.call('XTRIM', KEYS[1], 'MINID', text(ms) .. '-' .. text(seq + 1))
  end
  tidy()
  return gone, more
end
