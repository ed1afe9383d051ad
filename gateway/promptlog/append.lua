-- Write entries, then trim. A request that is logged already, or was admitted before its owner's history was erased, is
-- left out.
--
-- KEYS  3 the tenants that have a log
-- ARGV  3 retention, ms  4 most bytes  5 how much later than trimmed keys expire by themselves, ms  6 most entries to
--       trim  7 tenant  then for each entry: request, when it was admitted, ms, end user or '', sealed metadata, sealed
--       request or '', sealed response or ''
-- Replies
--   how many were written or there already

local keep, most_bytes, slack = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local expires = text(now + keep + slack)

local function erased(name, admitted)
  local at = redis.call('GET', prefix .. 'x:' .. name)
  return at and admitted <= tonumber(at)
end

local written, late = 0, 0
for index = 8, #ARGV, 6 do
  local request, admitted, user = ARGV[index], tonumber(ARGV[index + 1]), ARGV[index + 2]
  local metadata, asked, answered = ARGV[index + 3], ARGV[index + 4], ARGV[index + 5]
  local hash = hash_of(request)
  if redis.call('EXISTS', hash) == 1 then
    written = written + 1
  elseif not (erased('', admitted) or erased(request, admitted) or (user ~= '' and erased(user, admitted))) then
    local size = text(#metadata + #asked + #answered + OVERHEAD)
    local wanted = offset == 0 and '*' or text(now) .. '-*'
    local id = redis.call('XADD', KEYS[1], wanted, 'r', request, 'm', metadata, 'n', size)
    local fields = { 's', id, 'n', size }
    if asked ~= '' then
      fields[#fields + 1], fields[#fields + 2] = 'q', asked
    end
    if answered ~= '' then
      fields[#fields + 1], fields[#fields + 2] = 'a', answered
    end
    redis.call('HSET', hash, unpack(fields))
    redis.call('PEXPIREAT', hash, expires)
    count(tonumber(size))
    late = math.max(late, place(id) - admitted)
    written = written + 1
  end
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSETNX', KEYS[2], 'keep', text(keep))
  if late > tonumber(redis.call('HGET', KEYS[2], 'late') or '0') then
    redis.call('HSET', KEYS[2], 'late', text(late))
  end
  redis.call('PEXPIREAT', KEYS[1], expires)
  redis.call('PEXPIREAT', KEYS[2], expires)
  redis.call('SADD', KEYS[3], ARGV[7])
  trim(keep, most_bytes, tonumber(ARGV[6]))
end
return written
