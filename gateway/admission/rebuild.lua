-- Build a counter from the ledger's sum, from events that came after it was read, and from the open requests.
--
-- KEYS  1 tenant  2 live  3 usage stream  4 epoch
-- ARGV  1 clock offset in ms  2 prefix of the shard's keys  3 tenant id  4 counter  5 epoch when the reading began
--       6 id of the stream's last entry then  7 begin of the period, ms  8 its end, ms  9 sum in nano-USD; or, of a
--       window, 7 and 8 '' and 9 the sums by bucket, msgpack: bucket, sum, bucket, sum...  10 limit's id
-- Replies
--   REBUILT | KEPT (somebody was faster) | CHANGED (what was read no longer holds: read again)
--
-- The keys of requests are made here from the prefix; they bear the shard's hash tag like those in KEYS.

local tenant, counter = KEYS[1], ARGV[4]
local key = tenant .. ':' .. counter
local kind, window, subject, target = parts(counter)
local now = time(ARGV[1])
local epoch = redis.call('GET', KEYS[4])
if epoch ~= ARGV[5] then
  return { 'CHANGED' }
end
if subject == 'each' then
  subject = 'end_user'
end

local start, stop, sum, width, buckets = 0, 0, 0, nil, {}
if kind == 'b' then
  local held = redis.call('HMGET', key, 'start', 'end', 'limit')
  if holds(held, now) and held[3] == ARGV[10] then
    return { 'KEPT' }
  end
  start, stop, sum = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
else
  local held = redis.call('HMGET', key, 'epoch', 'limit')
  if held[1] == epoch and held[2] == ARGV[10] then
    return { 'KEPT' }
  end
  width = WIDTH[window]
  local sums = cmsgpack.unpack(ARGV[9])
  for at = 1, #sums, 2 do
    buckets[sums[at]] = sums[at + 1]
  end
end

local function fill(admitted, amount)
  if not width then
    sum = sum + (admitted >= start and admitted < stop and amount or 0)
  else
    local bucket = math.floor(admitted / width)
    buckets[bucket] = (buckets[bucket] or 0) + amount
  end
end

local function before(one, other)
  local ms, number = one:match('^(%d+)-(%d+)$')
  local other_ms, other_number = other:match('^(%d+)-(%d+)$')
  ms, other_ms = tonumber(ms), tonumber(other_ms)
  return ms < other_ms or ms == other_ms and tonumber(number) < tonumber(other_number)
end

-- Milliseconds of an ISO 8601 text in UTC. Date to days after Howard Hinnant, as in `iso`.
local function moment(stamp)
  local year, month, day, hour, minute, second, fraction = stamp:match('^(%d+)-(%d+)-(%d+)T(%d+):(%d+):(%d+)%.?(%d*)')
  year, month, day = tonumber(year), tonumber(month), tonumber(day)
  year = month <= 2 and year - 1 or year
  local era = math.floor(year / 400)
  local yoe = year - era * 400
  local doy = math.floor((153 * (month + (month > 2 and -3 or 9)) + 2) / 5) + day - 1
  local days = era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + doy - 719468
  local ms = tonumber((fraction .. '000'):sub(1, 3))
  return ((days * 24 + tonumber(hour)) * 60 + tonumber(minute)) * 60000 + tonumber(second) * 1000 + ms
end

if redis.call('EXISTS', KEYS[3]) == 1 then
  local about = redis.call('XINFO', 'STREAM', KEYS[3])
  for at = 1, #about, 2 do
    if about[at] == 'max-deleted-entry-id' and before(ARGV[6], about[at + 1]) then
      return { 'CHANGED' } -- an event that nobody counted went to the ledger after it was read
    end
  end
  for _, entry in ipairs(redis.call('XRANGE', KEYS[3], '(' .. ARGV[6], '+')) do
    local fields = {}
    for at = 1, #entry[2], 2 do
      fields[entry[2][at]] = entry[2][at + 1]
    end
    local sound, event = pcall(cjson.decode, fields['event'] or '')
    if not sound then
      return { 'CHANGED' }
    end
    local who = { event.project_id, event.key_id, event.route }
    local user = event.end_user ~= cjson.null and event.end_user or nil
    if event.tenant_id == ARGV[3] and counts(subject, target, who, user) then
      if fields['revision'] ~= '1' or fields['again'] then
        return { 'CHANGED' }
      end
      local admitted = moment(event.admitted_at)
      if kind == 'b' then
        fill(admitted, event.charged_nano_usd)
      elseif kind == 't' then
        fill(admitted, event.prompt_tokens + event.completion_tokens)
      elseif event.status ~= 'failed' or event.attempts > 0 then
        fill(admitted, 1)
      end
    end
  end
end

local spent = sum
for _, id in ipairs(redis.call('ZRANGE', KEYS[2], 0, -1)) do
  local reservation = ARGV[2] .. 'request:' .. id
  local held = redis.call('HMGET', reservation, 'state', 'admitted', 'bound', 'tokens', 'who', 'user', 'counters')
  if held[1] == 'open' and counts(subject, target, listed(held[5]), held[6]) then
    fill(tonumber(held[2]), kind == 'b' and tonumber(held[3]) or kind == 't' and tonumber(held[4]) or 1)
    local counters, there = listed(held[7]), false
    for _, other in ipairs(counters) do
      there = there or named(other, held[6]) == counter
    end
    if not there then
      counters[#counters + 1] = counter
      redis.call('HSET', reservation, 'counters', cmsgpack.pack(counters))
    end
  end
end

if kind == 'b' then
  local life = math.min(stop - now + 86400000, 32 * 86400000)
  redis.call('DEL', key)
  redis.call('HSET', key, 'start', ARGV[7], 'end', ARGV[8], 'spent', text(spent), 'reserved', text(sum - spent),
    'limit', ARGV[10])
  redis.call('PEXPIRE', key, life)
  remember(tenant, counter, now, life)
  return { 'REBUILT' }
end
local running = math.floor(now / width)
local n, oldest, values = 0, running, {}
for bucket, amount in pairs(buckets) do
  if bucket >= running - BUCKETS then
    n, oldest = n + amount, math.min(oldest, bucket)
    values[#values + 1] = text(bucket)
    values[#values + 1] = text(amount)
  end
end
redis.call('DEL', key)
redis.call('HSET', key, 'limit', ARGV[10], 'epoch', epoch, 'n', text(n), 'oldest', text(oldest), unpack(values))
redis.call('PEXPIRE', key, (BUCKETS + 2) * width)
remember(tenant, counter, now, (BUCKETS + 2) * width)
return { 'REBUILT' }
